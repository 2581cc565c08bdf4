//! Token buckets of many callers, in bounded memory.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// Rates of one kind of bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Amount that a caller gets at once.
    pub burst: u32,
    /// Time after which one more comes back.
    pub refill: Duration,
}

/// Buckets by caller. When there are too many callers, further ones share a bucket.
#[derive(Debug)]
pub struct Buckets<K> {
    rate: Rate,
    most: usize,
    by_caller: HashMap<K, Bucket>,
    shared: Bucket,
    /// Time at which full buckets were last removed, which costs as much as there are callers.
    swept: Instant,
}

/// The bucket of one caller.
#[derive(Debug)]
pub struct Bucket {
    rate: Rate,
    left: u32,
    filled: Instant,
    refused: u64,
}

impl<K: Eq + Hash> Buckets<K> {
    /// Creates buckets for at most `most` callers.
    pub fn new(rate: Rate, most: usize) -> Self {
        Self {
            rate,
            most,
            by_caller: HashMap::new(),
            shared: Bucket::new(rate),
            swept: Instant::now(),
        }
    }

    /// Takes an amount from a caller's bucket; returns the number of refusals since the last success.
    ///
    /// # Errors
    /// The time after which the bucket has enough again.
    pub fn take(&mut self, caller: K, amount: u32) -> Result<u64, Duration> {
        self.bucket(caller).take(amount)
    }

    /// Returns whether a caller's bucket has something left.
    pub fn has(&mut self, caller: &K) -> bool {
        self.by_caller.get_mut(caller).is_none_or(|bucket| {
            bucket.fill();
            bucket.left > 0
        })
    }

    fn bucket(&mut self, caller: K) -> &mut Bucket {
        let rate = self.rate;
        let whole = rate.refill * rate.burst;
        if self.by_caller.len() >= self.most && self.swept.elapsed() >= rate.refill {
            self.swept = Instant::now();
            self.by_caller.retain(|_, bucket| bucket.filled.elapsed() < whole);
        }
        let is_full = self.by_caller.len() >= self.most && !self.by_caller.contains_key(&caller);
        if is_full {
            &mut self.shared
        } else {
            self.by_caller.entry(caller).or_insert_with(|| Bucket::new(rate))
        }
    }

    /// Returns the number of callers that are remembered.
    pub fn callers(&self) -> usize {
        self.by_caller.len()
    }
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate) -> Self {
        Self {
            rate,
            left: rate.burst,
            filled: Instant::now(),
            refused: 0,
        }
    }

    /// Takes an amount; returns the number of refusals since the last success.
    ///
    /// # Errors
    /// The time after which the bucket has enough again.
    pub fn take(&mut self, amount: u32) -> Result<u64, Duration> {
        let rate = self.rate;
        self.fill();
        // An amount above the burst takes a full bucket.
        let amount = amount.min(rate.burst);
        if self.left < amount {
            self.refused += 1;
            return Err(rate.refill * (amount - self.left));
        }
        self.left -= amount;
        Ok(std::mem::take(&mut self.refused))
    }

    /// Puts back what has come since the last time.
    fn fill(&mut self) {
        let rate = self.rate;
        let passed = self.filled.elapsed().as_nanos() / rate.refill.as_nanos().max(1);
        let more = u32::try_from(passed).unwrap_or(rate.burst).min(rate.burst);
        if more == 0 {
            return;
        }
        self.left = self.left.saturating_add(more).min(rate.burst);
        self.filled = if self.left == rate.burst {
            Instant::now()
        } else {
            self.filled + rate.refill * more
        };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const RATE: Rate = Rate {
        burst: 10,
        refill: Duration::from_secs(1),
    };

    #[tokio::test(start_paused = true)]
    async fn a_caller_gets_its_burst_and_then_its_rate() {
        let mut buckets = Buckets::new(RATE, 100);
        let taken = (0..100).filter(|_| buckets.take("a", 1).is_ok());
        assert_eq!(taken.count(), 10);
        assert_eq!(buckets.take("b", 10), Ok(0));
        assert!(!buckets.has(&"b") && buckets.has(&"c"));
        advance(Duration::from_secs(1)).await;
        assert!(buckets.has(&"b"));
        advance(Duration::from_secs(2)).await;
        assert_eq!(buckets.take("a", 3), Ok(90));
        assert_eq!(buckets.take("a", 4), Err(Duration::from_secs(4)));
        advance(Duration::from_secs(3_600)).await;
        assert_eq!(buckets.take("a", 1_000), Ok(1));
        assert!(buckets.take("a", 1).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn callers_are_bounded_and_forgotten() {
        let mut buckets = Buckets::new(RATE, 100);
        let taken = (0..100_000).filter(|caller| buckets.take(*caller, 1).is_ok());
        // Each of the first, and the bucket that the others share.
        assert_eq!(taken.count(), 110);
        assert_eq!(buckets.callers(), 100);
        advance(Duration::from_secs(60)).await;
        assert!(buckets.take(200_000, 1).is_ok());
        assert_eq!(buckets.callers(), 1);
    }
}
