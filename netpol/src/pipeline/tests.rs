mod gaps;
mod judge;
mod lab;
mod minimal;
mod order;
