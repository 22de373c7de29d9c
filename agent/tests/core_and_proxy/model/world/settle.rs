//! Everything that is on its way arrives.

use super::{PROXIES, World};

impl World {
    /// Runs all parts until none of them has work.
    pub(super) fn settle(&mut self) {
        self.reap();
        for _ in 0..20 {
            for proxy in 0..PROXIES {
                self.write(proxy);
                self.proxies[proxy].1.send(self.now);
                self.run(proxy);
                while !self.proxies[proxy].1.down.is_empty() {
                    self.deliver(proxy);
                    self.release(proxy);
                }
            }
        }
    }
}
