"""Use what a run has learned: classify new images as one of its clients, or take that client's model elsewhere.

``trained_run`` opens a run's directory and answers for its clients; ``client_model`` asks one of them about images;
``files`` reads these, ``table`` writes the answers; ``graph`` and ``export`` make files that need none of this code.
"""
