"""What a sample needs to continue after an update's cut or an engine's death: see `Runner.continue_sample`."""
