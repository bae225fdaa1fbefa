"""Drafts: tokens that are proposed before the model is asked, and verified several at a time."""
