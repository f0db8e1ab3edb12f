"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs."""
