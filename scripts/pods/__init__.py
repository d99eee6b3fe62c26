"""Cloud TPU VM pods: what gcloud and the workers are told, and a pod's life from create to delete."""
