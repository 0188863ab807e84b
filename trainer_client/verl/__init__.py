"""verl's trainers with rollouts from a gateway, through verl's extension points: `trainer.v1.trainer_mode=gateway`.

verl loads `plugin` from the entry point `verl.plugins`. An import of this package alone does not load verl.
"""
