"""Rehearsing a job: the platforms' side of it (what each sets, names and restarts), and the containers that stand in.

model         what a rehearsal is made of; knows no platform and no Docker
vertex, ai_platform, gke    a job file of that platform -> a rehearsal
tpu           what a TPU slice puts into the environment and the metadata of its hosts
tuning        a study of a hyperparameter tuning job -> trials, one after the other
restarts      what each platform does when a replica ends
chaos         what the user asked to go wrong, and when
progress      what the replicas' logs say about the training
images        the local image that stands for a reference of the job file
world         network, buckets and sidecars of a rehearsal
runner        starts the replicas, follows them, and does what the platform would do
report        report.json and report.png
"""
