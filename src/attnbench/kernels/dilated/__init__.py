"""Dilated attention (LongNet): every branch keeps some tokens of each segment, and all branches share one softmax."""
