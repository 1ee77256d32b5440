"""Trees of drafts: the relations between their nodes as arrays."""

from specjax.trees.arrays import ancestor_mask, depths, first_children, is_node, next_siblings, of_chain

__all__ = ["ancestor_mask", "depths", "first_children", "is_node", "next_siblings", "of_chain"]
