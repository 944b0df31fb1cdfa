"""What every package needs and none is about: errors, limits, text, progress, signals, what systems
differ in.
"""
