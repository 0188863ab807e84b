"""How engines are watched beyond their health: standstills, drafts, their pages of metrics."""
