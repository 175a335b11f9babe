"""What peers do with a step, at their best settings: packs of whole documents, balanced or shared by ranks."""
