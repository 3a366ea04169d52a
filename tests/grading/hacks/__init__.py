"""A search for hacks: right answers are mutated so that they certainly say something else, and none should be right.

`rights` makes right answers or takes them from tables and data sets. `rewrites` changes their notation, which counts
where the strict reader of `meaning` finds another meaning. `phrases` puts words and signs around them that are wrong by
how they are made, and `notation` is the twin: other notations of the same answer, which have to stay right.
"""
