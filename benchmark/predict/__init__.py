"""Use what a run has learned: classify new images as one of its clients, or take that client's model elsewhere.

``trained_run`` opens a run's directory and answers for its clients: ``loaded`` makes the method again, ``new_client``
reads the images of a client more, ``client_model`` asks one about images. ``files`` reads these, ``answers`` makes
tables; ``graph`` and ``export`` write files that need none of this code.
"""
