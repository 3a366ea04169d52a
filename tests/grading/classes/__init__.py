"""Classes of responses that a rule of the grader is about: generators that make as many new members as are wanted.

Each module has `CLASSES`: generators by the name of their class.
"""
