"""Other projects' methods at their best settings: packs of whole documents, balanced or shared by ranks."""
