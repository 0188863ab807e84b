"""verl's trainers with their rollouts behind a gateway: `trainer.v1.trainer_mode=gateway`, through verl's own seams.

verl loads `plugin` by itself, from the entry point `verl.plugins`. Importing this package alone loads nothing of verl.
"""
