"""Run a Cloud Build file with the local Docker engine, or check it, by the rules of gcloud and Cloud Build.

It builds on the package ``trainyard``, which knows it by its registration alone.
"""
