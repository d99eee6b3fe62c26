"""Kubeflow Trainer."""
