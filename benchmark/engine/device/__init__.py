"""Know the machine: free memory, how many clients fit at once, precision, repeatable kernels.

Open ``capacity`` for the number of clients that are stepped together, ``memory`` for what is free and what operations
take, ``allocator``, ``precision`` and ``repeatable`` for what is set once.
"""
