"""Offline searches of skip sets and of DISCO's classifier, behind the command `freedraft calibrate`."""
