"""Evaluations: metric maths and readers of evaluation sets, without models."""
