"""Prediction of memory and time of a training run, before it has hardware.

`plan.plan` and `plan.show` are the command. Behind them: `run` (a params file in numbers), `models` and `hardware`
(what it runs, and on what), `memory` and `step_time` (the formulas), `fit` and `scaling` (what follows), `text`.
"""
