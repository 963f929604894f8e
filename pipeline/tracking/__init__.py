"""What people watch: start and end of the log, log lines, progress bars, images, trackers.

Nothing that a resume needs may live here: trackers are mirrors of the results.
"""
