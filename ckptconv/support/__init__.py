"""What every package needs: errors, limits, text, progress, signals, what systems differ in."""
