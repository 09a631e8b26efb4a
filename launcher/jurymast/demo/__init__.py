"""The run of `jurymast demo`, and a training script to try a cluster with."""
