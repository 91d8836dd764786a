"""Dilated attention (LongNet): each branch is a few dense calls on strided views, merged by their denominators."""
