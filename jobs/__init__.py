"""Runs in a queue: the store, the supervisor and the child process. Never imports torch, save in run_job's child."""
