"""Kernels of the model as functions of tensors. ``reference`` says slowly and plainly what each
must compute.
"""
