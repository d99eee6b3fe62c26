"""Kubernetes' objects of jobs: names, TrainJobs, what GKE adds."""
