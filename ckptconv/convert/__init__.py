"""Conversions: what is asked for, the plan of it, its execution, its report."""
