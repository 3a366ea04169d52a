"""Prediction of memory and time of a training run on given hardware: docs/explanation/planning.md.

`plan.plan` is the command. Behind it: `run` (a params file in numbers), `counted` (the shape of any model), `hardware`
(what it runs on), `memory` (what a GPU needs, and what makes it fit) and `step_time`.
"""
