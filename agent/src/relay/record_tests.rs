//! Objects in, frames out; and through the frames to an agent.
