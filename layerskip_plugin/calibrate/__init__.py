"""Offline searches of skip sets and of DISCO's classifier: the command `freedraft calibrate`."""
