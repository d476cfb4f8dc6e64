//! The ten rules of the data path, one test or more each.
