"""Rehearsing a job: run it in containers on this machine, as its platform would.

model           what a rehearsal consists of; knows no platform and no Docker
tpu             what a TPU slice adds to the environment and the metadata of its hosts
tuning          a study of a hyperparameter tuning job: trials, one after the other
restart_policy  what each platform does when a replica ends
faults          the failures that the user requests, and when they happen
progress        training progress, from the replicas' logs
images          the local image for a reference of the job file
sandbox         network, buckets and sidecars of a rehearsal
runner          starts the replicas, follows them, and applies the restart policy
session         one command: a job, or the trials of a tuning job
report          report.json and report.png
"""
