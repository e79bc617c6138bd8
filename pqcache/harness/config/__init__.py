"""From a command line to checked cells: options, composition, validation, identity."""
