"""Prediction of memory and time of a training run on given hardware; docs/explanation/planning.md explains it."""
