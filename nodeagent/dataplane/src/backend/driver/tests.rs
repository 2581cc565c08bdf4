//! Tests of the parts that all backends share. The drivers of the backends test the rest, each on a kernel in
//! memory.

use super::*;
use crate::backend::open_sides;
use crate::plan::NodePlan;

/// A data path that holds nothing. It refuses as many commits as it has a number, and accepts all others.
#[derive(Debug)]
struct Nothing(Family, usize);

impl DataPath for Nothing {
    type Content = ();
    type Staged = ();

    fn family(&self) -> Family {
        self.0
    }

    fn adopt(&mut self) -> Result<(), StepError> {
        Ok(())
    }

    fn frontends<'c>((): &'c (), _: &ServiceKey) -> &'c [FrontendAddr] {
        &[]
    }

    fn stage(&mut self, (): &mut (), _: Change<'_>, _: &mut Applied) -> Result<(), StepError> {
        Ok(())
    }

    fn commit(&mut self, (): &mut (), (): &mut (), _: &mut Applied) -> Result<(), StepError> {
        let Some(left) = self.1.checked_sub(1) else {
            return Ok(());
        };
        self.1 = left;
        Err(StepError::Refused("the table has an owner".into()))
    }

    fn accept(&mut self, (): &mut (), (): (), _: &mut Applied) {}

    fn check(&mut self, (): &mut ()) -> Result<Verification, StepError> {
        Ok(Verification::Equal)
    }

    fn has_services(&mut self) -> bool {
        false
    }
}

#[test]
fn a_family_without_programs_says_so_and_the_other_goes_on() {
    let node = NodePlan::default();
    let change = |family| Change {
        family,
        node: &node,
        services: &[],
        complete: true,
    };
    let open = |family| match family {
        Family::V4 => Ok(Nothing(family, 0)),
        Family::V6 => Err("no programs".to_owned()),
    };
    let [mut v4, mut v6] = open_sides("test", open).unwrap();
    let error = v6.apply(change(Family::V6)).unwrap_err();
    assert_eq!(error.to_string(), "IPv6: no programs");
    assert!(v6.verify().is_err() && !v6.has_services());
    v4.apply(change(Family::V4)).unwrap();
    assert_eq!(v4.verify().unwrap(), Verification::Equal);
    let none = open_sides("test", |_| Err::<Nothing, _>("no programs".to_owned()));
    assert!(none.is_err_and(|error| error.reason.starts_with("neither IPv4 nor IPv6")));
}

/// Another program owns the table for a moment, and gives it up while the driver searches: no ServicePort is at fault.
#[test]
fn a_refusal_of_everything_that_ends_leaves_no_service_port_out() {
    let services = ["a", "b"].map(|name| (ServiceKey::sample("shop", name), None));
    let node = NodePlan::default();
    let change = Change {
        family: Family::V4,
        node: &node,
        services: &services,
        complete: true,
    };
    // The whole change, the whole again at the start of the search, and its first half.
    let mut driver = Driver::new(Nothing(Family::V4, 3));
    let applied = driver.apply(change).unwrap();
    assert_eq!(applied.failures, []);
}
