"""PyTorch behind the Framework interface; importing this package does not import torch."""
