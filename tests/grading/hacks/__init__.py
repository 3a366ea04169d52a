"""A search for hacks: right answers are mutated so that a policy could earn more by them, and none should be right.

`rights` makes right answers or takes them from tables and data sets. `phrases` puts words and signs around them that
are wrong by how they are made. `notation` is the twin: other notations of the same answer have to stay right.
"""
