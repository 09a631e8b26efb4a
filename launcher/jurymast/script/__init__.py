"""A batch script's job: the script runs as sbatch would run it, and its training steps under our agents.

batch host   job ── the user's script
                     └─ srun (ours, found first on PATH): a training step?
                         ├─ no: the real srun
                         └─ yes: the real srun on active and spare nodes, and a supervisor (`step`)
every node               └─ the step's command as the user wrote it
                             └─ torchrun (ours, or its Python by `hook`): becomes the agent (`node`)
"""
