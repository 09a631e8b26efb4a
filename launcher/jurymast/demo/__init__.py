"""What `jurymast demo` runs, and a training script to try a cluster with."""
