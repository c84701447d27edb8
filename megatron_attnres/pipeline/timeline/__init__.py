"""What happened in a pipeline step, measured or simulated: records, sums, files and pictures."""
