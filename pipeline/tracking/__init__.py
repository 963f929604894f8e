"""What people watch: start and end of the log, log lines, progress bars, images, trackers."""
