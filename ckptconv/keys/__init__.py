"""What keys are called: rules, presets, mappings, and the fitting of one set of keys to another."""
