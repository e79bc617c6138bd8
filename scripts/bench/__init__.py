"""What the benchmark commands are made of: one file per comparison, over shared timing, options and inputs."""
