"""Turn a step of the plan into mini-batches on the device.

Open ``images`` for gathering and augmenting, ``features`` for what frozen parts make of images and is kept, ``noise``
for the draws of a step, ``pool`` for the images themselves, ``loaders`` for what the Trainer iterates over.
"""
