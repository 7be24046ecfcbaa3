"""Monitors for other trainers than Lightning's; each module imports what it is for."""
