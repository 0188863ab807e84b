"""Tools beside the serving path: doctor audits configurations, plan predicts, tune measures."""
