"""What people watch: blocks of text, log lines, progress bars, TensorBoard."""
