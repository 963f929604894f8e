"""The report: one page that tells how an experiment went, written without torch."""
