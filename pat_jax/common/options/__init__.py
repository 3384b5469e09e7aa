"""Options of configuration classes: declares them, reads them from files, writes --help."""
