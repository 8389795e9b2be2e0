"""Arguments to verbs; all printing, progress and --json in one place."""
